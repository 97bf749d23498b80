"""An adapter and its verdict become a release: content-addressed, traceable, promoted, rolled back."""
