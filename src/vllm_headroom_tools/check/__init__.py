"""The gate for CI: does this version of vLLM take or leak more memory than allowed?"""
