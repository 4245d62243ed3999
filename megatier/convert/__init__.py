"""Configs of other trainers as configs of this one."""
