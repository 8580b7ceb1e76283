"""How orders reach clients and replies come back."""
