"""``lowtide train``: a training job on one host, from a text file to a falling loss. Built on the public functions only."""
