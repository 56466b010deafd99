"""What runs left behind, read and shown: a page for one run or several, a live one, and a table of runs."""
