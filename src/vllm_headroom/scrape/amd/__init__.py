"""AMD's cards, read from the kernel's driver amdgpu."""
