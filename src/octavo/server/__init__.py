"""The OpenAI-compatible HTTP server, on FastAPI and uvicorn (the extra ``server``)."""
