"""The engine process as the API process sees it: started, watched, replaced, and fed with what is open."""
