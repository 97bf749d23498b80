"""The web page of `graft ui`: a view of the project on the public API. It keeps no state of its own."""
