"""The common base of all packages: errors, formatting, and reading untrusted files."""
