"""What will a loader make of a folder: rules over names, sizes and schemes."""
