"""One file for each section of the page: an address in, a page out."""
