"""Read AMD's cards through the kernel's amdgpu driver."""
