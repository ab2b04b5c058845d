"""RAG on one small machine: retrieval and generation as two pipelines over one memory budget.

`index.py` is the knowledge base on disk, `memory.py` what of it is in memory, `retrieval.py` and `engine.py` the two
pipelines, `answer.py` both together, `server.py` their OpenAI API. Decisions are in `serve/policy/retrieval.py` and
`rag_forecast.py`. Engines stay others' (serve/engines/).
"""
