"""Reports on a run: the doctor, the HTML page and the live display."""
