"""RAG on one small machine: retrieval and generation as two pipelines over one memory budget.

`index.py` is the knowledge base on disk, `store.py` what of it is in memory, `pipeline.py` the two pipelines,
`server.py` their OpenAI API. All decisions are in `serve/policy/rag.py`. Engines stay others' (serve/engines/).
"""
