"""What operators are told about KV caches, made checkable: templates, engine choice, checklist, articles' claims.

Pure functions over `engine.memory` and the flag catalog; every text a reader sees is there in English and, under
`zh`, in Chinese. `to_dict` of everything is JSON-ready, `localized` picks the language.
"""
