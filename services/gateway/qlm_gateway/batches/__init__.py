"""Batches of the OpenAI API: files of requests come in, each line becomes a request of the queue, files of answers go out.

records    files and batches, and how the API shows them
lines      the lines of an input file
folder     where all of it lies: a folder that all gateways share
driver     feeds the lines and writes the answers: at one gateway at a time, by a lease"""
