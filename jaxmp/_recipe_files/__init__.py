"""Recipe files: TOML to plain data and back."""
