"""Recipes: TOML files, checked and made into objects; ours lie beside this file."""
