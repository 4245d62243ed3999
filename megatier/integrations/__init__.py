"""megatier inside other programs' training loops."""
