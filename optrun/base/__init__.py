"""What every room uses: errors, formatting and reading files of others."""
