"""The model's side of a load: what goes where."""
