"""A live page on runs (docs/watch.md): `following` looks at their directories, `server` shows what it finds."""
