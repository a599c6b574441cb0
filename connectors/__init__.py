"""The only code that knows an engine: one thin half per engine around the engine-free ``connectors.plan``."""
