"""The command `plan`: will a model fit?"""
