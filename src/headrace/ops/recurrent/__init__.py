"""Recurrent mixers: causal convolution and the gated delta rule."""
