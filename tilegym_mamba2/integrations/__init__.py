"""The scan and the one-token update inside other packages; each module here is imported only by who wants it."""
