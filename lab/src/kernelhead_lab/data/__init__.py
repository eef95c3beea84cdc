"""The data with which the tables were measured: both CIFARs on the device, pets and cars from packed files.

The augmentation is that of the paper's protocol. torchvision's transforms are not used: here an image is a function
of a few random numbers, so that runs repeat to the bit. One pipeline feeds many networks on one GPU.
"""
