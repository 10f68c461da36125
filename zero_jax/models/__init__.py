"""Reference transformers: ordinary models that know nothing of zero_jax."""
