"""The table of Megatron-LM's arguments that recipes decide, and Megatron-Bridge's fields as a column of it: written
from, read with, classed and documented from. One file a subject, the rows in the order of the command line."""
