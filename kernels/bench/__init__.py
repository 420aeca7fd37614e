"""The attention benchmark: `python -m kernels.bench`, or `kvoncall bench attention`."""
