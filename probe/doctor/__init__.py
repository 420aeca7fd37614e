"""`kvoncall doctor`: what is wrong with a target now, how sure that is, what only looks like it, what to change."""
