"""What the kernel's driver amdgpu says of AMD's cards."""
