"""Batches of the OpenAI API: files of requests come in, each line becomes a request of the queue, files of answers go out.

records    files and batches, and how the API shows them
lines      the lines of an input file
store      files, batches and quotas by tenant, as named objects
answers    the answers of a batch until it ends
objects    the port to where objects lie: `folder` on a file system, `bucket` in an S3-compatible store
driver     feeds the lines and writes the answers: at one gateway at a time, by a lease"""
