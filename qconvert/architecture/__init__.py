"""Names: what the tensors of a model are called, which role each plays, how families differ."""
