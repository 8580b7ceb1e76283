"""What every engine and every algorithm shares: no files, no command line, no recipes."""
