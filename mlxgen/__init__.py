"""mlxgen: text generation for MLX models with speculative decoding that is lossless."""

__version__ = "0.1.0"
