"""The paged one-head KV cache: its memory, page ownership and prefix cache. Imports no other
package of this repository.
"""
