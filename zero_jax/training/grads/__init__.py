"""Gradients of a batch: accumulated over microbatches and devices, sent quantized, and those of some params alone."""
