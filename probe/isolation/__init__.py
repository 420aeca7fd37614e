"""Black-box probe of an OpenAI endpoint: does its prefix cache keep one tenant's text from another's?"""
