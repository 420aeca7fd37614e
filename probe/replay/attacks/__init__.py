"""What the prefix-collision replay does to its engine, one module a variant."""
