"""What every report is made with: figures, tables as text, a page that needs no network, a folder. Knows no records."""
