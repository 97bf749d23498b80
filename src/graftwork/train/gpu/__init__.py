"""The GPU step: a decoder whose forward and backward passes are written out, without autograd."""
