"""What every room uses: errors, formatting, reading files of others, garbage collection."""
