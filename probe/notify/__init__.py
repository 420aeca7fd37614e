"""What happens to an alert once it fires: silences, acknowledgement, inhibition, grouping, delivery, import.

`matchers`, `receivers`, `muting`, `grouping` and `message` are pure; `senders` talks to the world; `dispatcher` ties
them to the store. The store itself imports `matchers` and `receivers`, so those two import nothing of it.
"""
