"""Packs and transposes matrices with SIMD instructions."""
