"""Dense linear maps, plain and quantised."""
