"""The command `preflight`: would vLLM start on these GPUs now?"""
