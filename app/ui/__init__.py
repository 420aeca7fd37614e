"""What the pages are made of: queries over the store, tiles, charts, tables. Pages themselves stay thin."""
