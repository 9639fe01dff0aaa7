"""Quantized weights and low-rank adapters: settings, arithmetic, and adapted layers."""
