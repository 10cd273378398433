"""Analytic estimates: what a step computes, holds, sends and costs on a mesh."""
