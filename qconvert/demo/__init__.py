"""The embedded model, the text it is evaluated on, and the demonstration that uses both."""
