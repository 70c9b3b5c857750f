"""The gate for CI: did this version of vLLM take or leak more memory than it may?"""
