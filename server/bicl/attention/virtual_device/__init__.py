"""The cache as a device under FlashAttention's functions, which ``flash_attn_interface`` names."""
