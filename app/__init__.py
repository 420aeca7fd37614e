"""The Streamlit app: what an on-call engineer sees. `streamlit run app` starts it."""
